#!/usr/bin/env bash
# Installs disco from this checkout for one user: a virtual environment of its own, the default model, and `disco` on
# the PATH. Running it again is harmless and fast. Written for bash 3.2, the one macOS ships.
# shellcheck disable=SC2016  # several texts carry a literal $: lines for start-up files, a wrapper, names of variables
# shellcheck disable=SC2329  # the handlers are invoked by trap
set -euo pipefail
umask 022 # nobody else may write into what is run

readonly MARK='# added by disco install.sh'
readonly MARK_NEW="$MARK, which made this file"
readonly WRAPPER_MARK='# disco wrapper, made by install.sh'
readonly NEEDED_KB=900000 # environment 300 MB + scratch of the build 500 MB + model 100 MB

usage() {
  cat <<'TEXT'
usage: ./install.sh [--demo] [--service] [--fleet] [--prefix DIR]
       ./install.sh --uninstall [--purge] [--prefix DIR]

  --demo         start `disco demo` when all is installed
  --service      start disco at each login from now on (systemd or launchd), and now
  --fleet        Ray as well, 240 MB, which starts again what lends a fleet's hosts; it stays from then on
  --prefix DIR   install under DIR (DIR/bin/disco, DIR/share/disco) and touch no shell start-up file
  --uninstall    remove what this script installed; models, config and history stay
  --purge        with --uninstall: remove models, config and history too, with the segments, exits and certificates of
                 two machines; asks at a terminal
  --help         show this text

Environment: PYTHON (the interpreter to try first), CXX, CMAKE_BUILD_PARALLEL_LEVEL, NO_COLOR, and CMAKE_ARGS, the
options of llama.cpp's build: -DGGML_CUDA=on or -DGGML_VULKAN=on for a GPU (macOS has Metal anyway).
TEXT
}

usage_error() {
  printf 'install.sh: %s\n\n' "$1" >&2
  usage >&2
  exit 2
}

# ---- what the user sees -------------------------------------------------------------------------------------------

LIVE=0 # 1: the terminal can redraw a line
if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]; then LIVE=1; fi
BOLD='' RED='' PLAIN=''
if [ "$LIVE" = 1 ] && [ -z "${NO_COLOR:-}" ]; then BOLD=$'\033[1m' RED=$'\033[31m' PLAIN=$'\033[0m'; fi

say() { printf '%s[%4ds]%s %s\n' "$BOLD" "$SECONDS" "$PLAIN" "$1"; }
note() { printf '        %s\n' "$1"; }
complain() { printf '%sinstall.sh: %s%s\n' "$RED" "$1" "$PLAIN" >&2; }
die() {
  complain "$1"
  exit 1
}

# ---- where things are ---------------------------------------------------------------------------------------------

is_macos() { [ "$(uname -s)" = Darwin ]; }

set_places() {
  [ -n "${HOME:-}" ] || die 'HOME is not set'
  SOURCE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  if is_macos; then
    USER_DATA="$HOME/Library/Application Support/disco"
  else
    USER_DATA="${XDG_DATA_HOME:-$HOME/.local/share}/disco"
  fi
  if [ -n "$PREFIX" ]; then
    case $PREFIX in /*) ;; *) PREFIX="$PWD/$PREFIX" ;; esac
    BASE="$PREFIX/share/disco"
    BIN="$PREFIX/bin"
    export DISCO_MODELS_DIR="$BASE/models"
  else
    BASE="$USER_DATA"
    BIN="$HOME/.local/bin"
  fi
  VENV="$BASE/venv"
  LOG="$VENV/install.log"
  STAMP="$VENV/install.stamp"
  LOCK="$BASE/.install.lock"
  PACKAGES=requirements.lock
  if [ "$FLEET" = 1 ] || has_ray; then PACKAGES=requirements-fleet.lock; fi
}

has_ray() { # whether this environment was made with --fleet
  local folder
  for folder in "$VENV"/lib/python*/site-packages/ray; do
    if [ -d "$folder" ]; then return 0; fi
  done
  return 1
}

# Folders of config and history (and, without a prefix, models), one a line.
user_folders() {
  if is_macos; then
    printf '%s\n' "$USER_DATA" "$HOME/Library/Caches/disco" "$HOME/Library/Logs/disco"
  else
    printf '%s\n' "$USER_DATA" "${XDG_CONFIG_HOME:-$HOME/.config}/disco" "${XDG_STATE_HOME:-$HOME/.local/state}/disco" \
      "${XDG_CACHE_HOME:-$HOME/.cache}/disco"
  fi
}

# ---- checks: nothing is changed before all of them pass -----------------------------------------------------------

# advice APT DNF PACMAN MACOS: the command for this machine, or all of them when the machine is none we know.
advice() {
  if is_macos; then
    note "$4" >&2
  elif command -v apt-get >/dev/null 2>&1; then
    note "sudo apt install $1" >&2
  elif command -v dnf >/dev/null 2>&1; then
    note "sudo dnf install $2" >&2
  elif command -v pacman >/dev/null 2>&1; then
    note "sudo pacman -S $3" >&2
  else
    note "Debian, Ubuntu:  sudo apt install $1" >&2
    note "Fedora:          sudo dnf install $2" >&2
    note "Arch:            sudo pacman -S $3" >&2
    note "macOS:           $4" >&2
  fi
}

find_python() { # sets PY; without a usable one, PY is empty and PY_BARE names one that only lacks venv
  PY='' PY_BARE=''
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
    if "$candidate" -c 'import ensurepip, sqlite3, ssl, venv, zlib' >/dev/null 2>&1; then
      PY=$candidate
      return
    fi
    PY_BARE=${PY_BARE:-$candidate}
  done
}

compiles() { # whether the compiler $1 makes a program out of C++17 with the standard library
  local scratch status=0
  scratch=$(mktemp -d)
  printf '#include <string>\n#include <thread>\nint main() { return std::string("x").size() != 1; }\n' |
    "$1" -std=c++17 -x c++ - -o "$scratch/program" >/dev/null 2>&1 || status=1
  rm -rf "$scratch"
  return "$status"
}

find_compiler() { # sets CXX_FOUND, empty without a working one
  CXX_FOUND=''
  if is_macos && ! xcode-select -p >/dev/null 2>&1; then return; fi # the stubs in /usr/bin would open a dialog
  local candidate
  for candidate in "${CXX:-}" c++ g++ clang++; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && compiles "$candidate"; then
      CXX_FOUND=$candidate
      return
    fi
  done
}

nearest_folder() { # the closest folder above $1 that exists
  local folder=$1
  while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
  printf '%s\n' "$folder"
}

check_files() {
  local thing
  for thing in pyproject.toml disco_daemon tui profiles; do
    [ -e "$SOURCE/$thing" ] || die "$SOURCE is no complete checkout: $thing is missing"
  done
  for thing in "$BASE" "$BIN"; do
    [ -w "$(nearest_folder "$thing")" ] || die "cannot write to $(nearest_folder "$thing"): choose another place with --prefix DIR"
  done
  if { [ -e "$BIN/disco" ] || [ -L "$BIN/disco" ]; } && ! is_ours; then
    die "$BIN/disco exists and this script did not make it: move it away, or choose another place with --prefix DIR"
  fi
}

is_ours() { # whether $BIN/disco is one of this script's
  if [ -L "$BIN/disco" ]; then
    case $(readlink "$BIN/disco") in */disco/venv/bin/disco) return 0 ;; *) return 1 ;; esac
  fi
  [ -f "$BIN/disco" ] && grep -qF "$WRAPPER_MARK" "$BIN/disco"
}

check_tools() {
  local missing=0 free
  find_python
  if [ -z "$PY" ]; then
    missing=1
    if [ -n "$PY_BARE" ]; then
      complain "$PY_BARE cannot make virtual environments (venv, ensurepip, sqlite3 or ssl is missing). Install:"
    else
      complain 'no Python 3.11 or newer (tried $PYTHON, python3.13, python3.12, python3.11, python3). Install:'
    fi
    advice 'python3 python3-venv' python3 python 'brew install python@3.13'
  fi
  find_compiler
  if [ -z "$CXX_FOUND" ]; then
    missing=1
    complain 'no working C++ compiler (tried $CXX, c++, g++, clang++); the engine is compiled for this machine. Install:'
    advice build-essential gcc-c++ base-devel 'xcode-select --install'
  fi
  free=$(df -Pk "$(nearest_folder "$BASE")" | awk 'NR == 2 { print $4 }')
  case $free in
    '' | *[!0-9]*) ;; # a file system that does not say
    *) if [ "$free" -lt "$NEEDED_KB" ]; then
      missing=1
      complain "only $((free / 1000)) MB free for $BASE, $((NEEDED_KB / 1000)) MB are needed"
    fi ;;
  esac
  if [ "$missing" = 1 ]; then
    note 'Nothing was changed. Run this script again afterwards.' >&2
    exit 1
  fi
}

# ---- one at a time ------------------------------------------------------------------------------------------------

LOCKED=0
CHILD=''

command_line() { # of process $1; empty when there is none
  if [ -r "/proc/$1/cmdline" ]; then
    tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null || true
  else
    ps -p "$1" -o command= 2>/dev/null || true
  fi
}

runs() { # whether process $1 (may be empty) is there and its command line contains $2
  [ -n "$1" ] && kill -0 "$1" 2>/dev/null && case $(command_line "$1") in *"$2"*) true ;; *) false ;; esac
}

lock() {
  local owner child tries=0
  mkdir -p "$BASE"
  while ! mkdir "$LOCK" 2>/dev/null; do
    owner=$(cat "$LOCK/pid" 2>/dev/null || true)
    if runs "$owner" install.sh; then
      die "another install.sh works on $BASE (process $owner): wait for it to end"
    fi
    tries=$((tries + 1))
    if [ -z "$owner" ] && [ "$tries" -lt 3 ]; then # its owner may be between mkdir and writing its number
      sleep 1
      continue
    fi
    [ "$tries" -lt 6 ] || die "cannot get the lock: remove $LOCK"
    child=$(cat "$LOCK/child" 2>/dev/null || true)
    if runs "$child" "$VENV/bin/python"; then kill -TERM -- "-$child" 2>/dev/null || true; fi # pip of a killed run
    # Renaming is atomic: of two that clear the same stale lock, one wins; a fresh lock taken by mistake is put back.
    if mv "$LOCK" "$LOCK.$$" 2>/dev/null; then
      if [ "$(cat "$LOCK.$$/pid" 2>/dev/null || true)" = "$owner" ]; then
        rm -rf "$LOCK.$$"
      else
        mv "$LOCK.$$" "$LOCK"
      fi
    fi
  done
  LOCKED=1
  printf '%s\n' "$$" >"$LOCK/pid"
}

unlock() {
  if [ "$LOCKED" = 1 ]; then rm -rf "$LOCK"; fi
  LOCKED=0
}

stop_child() {
  if [ -n "$CHILD" ]; then kill -TERM -- "-$CHILD" 2>/dev/null || true; fi
  CHILD=''
}

on_signal() {
  stop_child
  unlock
  printf '\n' >&2
  complain 'interrupted: run it again to go on'
  exit 130
}

# ---- installing ---------------------------------------------------------------------------------------------------

# A hash over everything that the installation is made from, printed by the Python that would be used.
fingerprint() {
  "$1" - "$SOURCE" "$PACKAGES" <<'PY'
import hashlib, os, pathlib, sys

source = pathlib.Path(sys.argv[1])
names = ("pyproject.toml", "README.md", "LICENSE", "install.sh", sys.argv[2], "requirements-build.lock")
files = [source / name for name in names]
files += sorted(path for path in (source / "native").glob("*.*") if path.is_file()) # what the engine is compiled with
for folder in ("disco_daemon", "tui", "profiles"):
    files += sorted(path for path in (source / folder).rglob("*") if path.suffix != ".pyc")
digest = hashlib.sha256((sys.version + os.environ.get("CMAKE_ARGS", "")).encode())
for path in files:
    if path.is_file():
        digest.update(f"\n{path.relative_to(source)} {path.stat().st_size}\n".encode() + path.read_bytes())
print(digest.hexdigest())
PY
}

is_current() { # whether the environment is whole and made from exactly this checkout
  [ -f "$STAMP" ] && [ -x "$VENV/bin/disco" ] && [ "$(cat "$STAMP")" = "$(fingerprint "$VENV/bin/python" 2>/dev/null)" ]
}

make_venv() { # the stamp is written last, so without one an earlier run did not finish
  if [ -f "$STAMP" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -f "$STAMP"
    return
  fi
  if [ -e "$VENV" ]; then say 'removing a half-finished environment'; fi
  rm -rf "$VENV"
  say "making an environment with $("$PY" --version 2>&1)"
  "$PY" -m venv "$VENV" || die "$PY -m venv failed (see above)"
}

last_progress() { # the newest thing worth showing in pip's log
  tail -n 300 "$LOG" 2>/dev/null | awk '
    match($0, /\[ *[0-9]+\/[0-9]+\]/)  { line = "compiling the engine " substr($0, RSTART, RLENGTH); next }
    match($0, /\[ *[0-9]+%\] +[BL]/)   { line = "compiling the engine " substr($0, RSTART, RLENGTH - 2); next }
    /^ *Collecting /                   { line = "collecting " $2; next }
    /^ *Downloading /                  { line = "downloading " $2; sub(/[^ ]*\//, "", line); next }
    /Installing build dependencies/    { line = "installing build tools"; next }
    /^ *Building wheel for /           { line = "building " $4; next }
    /^ *Installing collected packages/ { line = "installing packages"; next }
    END { if (line != "") print line }' || true
}

watch_child() { # show what CHILD does until it ends
  local began=$SECONDS shown=$SECONDS every text=''
  while kill -0 "$CHILD" 2>/dev/null; do
    sleep 1
    if [ "$LIVE" = 1 ]; then
      text=$(last_progress)
      printf '\r\033[K[%4ds] %.70s' "$SECONDS" "$text"
      continue
    fi
    every=10 # s between lines; rarer later, so that a slow machine's log stays short
    if [ $((SECONDS - began)) -gt 300 ]; then every=60; fi
    if [ $((SECONDS - shown)) -ge "$every" ]; then
      shown=$SECONDS
      say "$(last_progress)"
    fi
  done
  if [ "$LIVE" = 1 ]; then printf '\r\033[K'; fi
}

show_failure() {
  complain 'the installation failed.'
  if grep -qE 'ConnectionError|NewConnectionError|Name or service not known|Temporary failure in name|nodename nor servname|ProxyError|ReadTimeout' "$LOG"; then
    complain 'pip could not reach its package index: check the network and the proxy, then run this script again.'
  elif grep -q 'No space left on device' "$LOG"; then
    complain "the disk is full: free $((NEEDED_KB / 1000)) MB (also in ${TMPDIR:-/tmp}), then run this script again."
  elif grep -qE 'Killed|signal terminated program' "$LOG"; then
    complain 'the compiler was killed, most likely for memory: try again with CMAKE_BUILD_PARALLEL_LEVEL=1.'
  fi
  {
    if grep -qE '(^|[^a-z-])error:' "$LOG"; then
      printf '\n---- errors ----\n'
      grep -E -B 1 -A 4 '(^|[^a-z-])error:' "$LOG" | cut -c 1-300 | head -n 40
    fi
    printf '\n---- last lines of the log ----\n'
    tail -n 30 "$LOG" | cut -c 1-300
    printf '\nThe whole log: %s\n' "$LOG"
  } >&2
  exit 1
}

# All comes from the lock files, by their hashes: first the tools that build, which go again at the end, then what is needed
# (the engine is compiled beside the rest; anew where it is of before a mend). Beside the compiler comes this checkout, which
# fetches nothing, and the default model, which is asked for again afterwards. Of all but this checkout Python keeps compiled
# what is imported here: all files of numpy, openai and the others take a quarter of a minute.
# In one process, so that a signal ends whatever it is at.
PIP_STEPS='
import subprocess, sys
source, copy, packages, forced = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
pip = [sys.executable, "-m", "pip"]
whole = [*pip, "install", "-v", "--no-input", "--disable-pip-version-check"]
install = [*whole, "--no-compile"]
first = "import subprocess, sys, disco_daemon.daemon.daemon, disco_tui.app; subprocess.call([*sys.argv[1:], \"models\", \"fetch\"])"
for step in (
    [*install, "--require-hashes", "-r", f"{source}/requirements-build.lock"],
    [sys.executable, f"{source}/native/install_locked.py", f"{source}/{packages}", *install[4:], *forced, "--then",
        *whole, "--no-deps", "--no-build-isolation", copy, "--then", sys.executable, "-P", "-c", first, f"{sys.prefix}/bin/disco"],
    [sys.executable, f"{source}/native/current_kernels.py", *install[4:], "--require-hashes", "--no-build-isolation",
        "-r", f"{source}/{packages}"],
    [*pip, "uninstall", "--yes", "--disable-pip-version-check", "cmake", "ninja", "scikit-build-core"],
):
    code = subprocess.call(step)
    if code:
        sys.exit(code)
'

install_packages() {
  local copy="$VENV/source" lean="$SOURCE/native/llama_cpp.cmake" thing status=0
  # From a copy: setuptools builds inside its source folder, and a checkout must stay as it is.
  rm -rf "$copy"
  mkdir "$copy"
  for thing in pyproject.toml README.md LICENSE disco_daemon tui profiles; do
    if [ -e "$SOURCE/$thing" ]; then cp -R "$SOURCE/$thing" "$copy/"; fi
  done
  find "$copy" -type d -name __pycache__ -prune -exec rm -rf {} +

  if [ -z "${CMAKE_BUILD_PARALLEL_LEVEL:-}" ]; then
    CMAKE_BUILD_PARALLEL_LEVEL=$(getconf _NPROCESSORS_ONLN 2>/dev/null || printf 2)
    export CMAKE_BUILD_PARALLEL_LEVEL
  fi
  say "installing packages; the engine is compiled for this machine, minutes the first time ($CMAKE_BUILD_PARALLEL_LEVEL cores)"
  set -m # a process group of its own, so that a signal ends the compilers too
  # Neither pip's cache nor the environment tells builds with other CMAKE_ARGS apart.
  # shellcheck disable=SC2086  # two words
  CMAKE_ARGS="\"-DCMAKE_PROJECT_llama_cpp_INCLUDE=$lean\" ${CMAKE_ARGS:-}" \
    "$VENV/bin/python" -c "$PIP_STEPS" "$SOURCE" "$copy" "$PACKAGES" \
    ${CMAKE_ARGS:+--no-cache-dir --force-reinstall} >"$LOG" 2>&1 </dev/null &
  CHILD=$!
  set +m
  printf '%s\n' "$CHILD" >"$LOCK/child"
  watch_child
  wait "$CHILD" || status=$?
  if [ "$status" != 0 ]; then kill -TERM -- "-$CHILD" 2>/dev/null || true; fi # what the half that did not fail has started
  CHILD=''
  rm -f "$LOCK/child"
  rm -rf "$copy"
  if [ "$status" != 0 ]; then show_failure; fi
}

link_command() {
  mkdir -p "$BIN"
  if [ -z "$PREFIX" ]; then
    ln -sfn "$VENV/bin/disco" "$BIN/disco"
    return
  fi
  {
    printf '#!/bin/sh\n%s\n' "$WRAPPER_MARK"
    printf 'export DISCO_MODELS_DIR="${DISCO_MODELS_DIR:-%s}"\n' "$(printf %s "$BASE/models" | sed 's/[\\"$`]/\\&/g')"
    printf 'exec "%s" "$@"\n' "$(printf %s "$VENV/bin/disco" | sed 's/[\\"$`]/\\&/g')"
  } >"$BIN/disco.$$"
  chmod 755 "$BIN/disco.$$"
  mv -f "$BIN/disco.$$" "$BIN/disco"
}

# ---- the PATH -----------------------------------------------------------------------------------------------------

add_line() { # append line $2 to file $1, once
  local mark=$MARK
  if [ -f "$1" ] && grep -qF "$MARK" "$1"; then return; fi
  if [ ! -e "$1" ]; then
    mkdir -p "$(dirname "$1")"
    mark=$MARK_NEW
  elif [ -n "$(tail -c 1 "$1")" ]; then
    printf '\n' >>"$1" # the last line had no end
  fi
  printf '%s  %s\n' "$2" "$mark" >>"$1"
  note "added $BIN to the PATH in $1"
}

remove_line() { # take our line out of file $1 again, and the file if we made it and nothing else is in it
  local made=0
  if [ ! -f "$1" ] || ! grep -qF "$MARK" "$1"; then return; fi
  if grep -qF "$MARK_NEW" "$1"; then made=1; fi
  grep -vF "$MARK" "$1" >"$1.disco.$$" || true
  cat "$1.disco.$$" >"$1" # in place: the file may be a link into somebody's dotfiles
  rm -f "$1.disco.$$"
  if [ "$made" = 1 ] && [ ! -s "$1" ]; then rm -f "$1"; fi
  note "removed the PATH line from $1"
}

fish_file() { printf '%s\n' "${XDG_CONFIG_HOME:-$HOME/.config}/fish/conf.d/disco.fish"; }

put_on_path() {
  local posix='export PATH="$HOME/.local/bin:$PATH"' file
  case ":$PATH:" in *":$BIN:"*) return ;; esac
  case ${SHELL:-} in
    */zsh) add_line "${ZDOTDIR:-$HOME}/.zshrc" "$posix" ;;
    */fish) add_line "$(fish_file)" 'set -gx PATH "$HOME/.local/bin" $PATH' ;;
    *)
      add_line "$HOME/.profile" "$posix"
      for file in "$HOME/.bash_profile" "$HOME/.bashrc"; do # bash reads the first one instead of .profile
        if [ -e "$file" ]; then add_line "$file" "$posix"; fi
      done
      ;;
  esac
  NEW_SHELL=1
}

# ---- the two things this script does ------------------------------------------------------------------------------

install() {
  NEW_SHELL=0 FRESH=0
  check_files
  if ! is_current; then check_tools; fi
  trap 'stop_child; unlock' EXIT
  trap on_signal INT TERM HUP
  lock
  if is_current; then
    say 'already installed from this checkout'
  else
    FRESH=1
    make_venv
    install_packages
    fingerprint "$VENV/bin/python" >"$STAMP.new"
    mv -f "$STAMP.new" "$STAMP"
    say "installed in $VENV"
  fi
  link_command
  "$BIN/disco" models fetch --online >/dev/null || die 'the default model is missing (see above); then run this script again'
  say 'the default model is ready'
  if [ -z "$PREFIX" ]; then put_on_path; fi
  unlock
  trap - EXIT INT TERM HUP

  if [ "$SERVICE" = 1 ]; then
    "$BIN/disco" service install || die 'disco is installed, its service is not (see above)'
  fi
  if [ "$DEMO" = 1 ]; then
    say 'starting the demo'
    exec "$BIN/disco" demo
  fi
  local disco=disco
  if [ -n "$PREFIX" ]; then disco=$(printf %q "$BIN/disco"); fi
  if [ "$FRESH" = 1 ] && [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && [ -z "${CI:-}" ]; then
    "$BIN/disco" models pull || note "no model was fetched: $disco models pull asks again"
  fi
  say 'done. Next:'
  note "$disco tui     # ask something: it starts what it needs"
  note "$disco setup   # add a server with its key, or a real model in place of the stand-in ($disco models recommend)"
  if [ "$SERVICE" = 1 ]; then note "$disco service status"; else note "$disco demo    # half a minute: what this is for"; fi
  if [ "$NEW_SHELL" = 1 ]; then note "Open a new shell first, so that it finds disco (or now: export PATH=\"\$HOME/.local/bin:\$PATH\")."; fi
}

remove_service() { # the one that starts this installation, not another one's
  local file
  for file in "${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/disco.service" "$HOME/Library/LaunchAgents/org.disco.daemon.plist"; do
    if [ -f "$file" ] && grep -qF "$VENV/" "$file" && [ -x "$VENV/bin/disco" ]; then
      "$VENV/bin/disco" service uninstall >/dev/null || rm -f "$file"
      note "removed the service ($file)"
    fi
  done
}

warn_if_running() { # `disco up` runs in somebody's terminal: it is theirs to end
  if command -v pgrep >/dev/null 2>&1 &&
    pgrep -f "$(printf %s "$VENV/bin/" | sed 's/[][\\.*^$+?(){}|]/\\&/g')" >/dev/null 2>&1; then
    note 'a disco process still runs from here: end it (Ctrl-C in its terminal)'
  fi
}

# Ask before anything goes that cannot be made again; who is no terminal has said it by --purge.
agrees_to_purge() {
  local answer=''
  if [ "$PURGE" = 0 ] || [ ! -t 0 ]; then return 0; fi
  printf 'This removes models, config, history, segments and exits, and the certificates of paired machines. Go on? [y/N] '
  read -r answer || true
  case $answer in y | Y | yes) return 0 ;; esac
  return 1
}

uninstall() {
  local folder file kept=0 shared=0
  agrees_to_purge || die 'nothing was removed'
  if [ -d "$BASE" ]; then
    trap 'unlock' EXIT
    trap on_signal INT TERM HUP
    lock
    remove_service
    warn_if_running
    rm -rf "$VENV"
    if [ "$PURGE" = 1 ]; then rm -rf "$BASE/models"; fi
    unlock
    trap - EXIT INT TERM HUP
  fi
  if [ -e "$BIN/disco" ] || [ -L "$BIN/disco" ]; then
    if is_ours; then rm -f "$BIN/disco"; else note "left $BIN/disco alone: this script did not make it"; fi
  fi
  if [ -n "$PREFIX" ]; then
    rmdir "$BIN" "$BASE" "$PREFIX/share" 2>/dev/null || true
    if [ -d "$USER_DATA/venv" ]; then shared=1; fi # the user's other installation needs its config and history
  else
    for file in "$HOME/.profile" "$HOME/.bash_profile" "$HOME/.bashrc" "${ZDOTDIR:-$HOME}/.zshrc" "$(fish_file)"; do
      remove_line "$file"
    done
  fi
  say 'disco is uninstalled'

  if [ "$PURGE" = 1 ] && [ "$shared" = 1 ]; then
    note 'config and history stay: another installation of disco uses them'
  elif [ "$PURGE" = 1 ]; then
    user_folders | while IFS= read -r folder; do
      if [ -d "$folder" ]; then
        rm -rf "$folder"
        note "removed $folder"
      fi
    done
  else
    rmdir "$BASE" 2>/dev/null || true
    if [ -d "$BASE/models" ]; then
      kept=1
      note "kept the models in $BASE/models"
    fi
    while IFS= read -r folder; do
      if [ -d "$folder" ] && [ -n "$(find "$folder" -mindepth 1 -maxdepth 1 ! -name models)" ]; then
        kept=1
        note "kept config and history in $folder"
      fi
    done <<TEXT
$(user_folders)
TEXT
    if [ "$kept" = 1 ]; then note '--uninstall --purge removes these too'; fi
  fi
}

# ---- main ---------------------------------------------------------------------------------------------------------

DEMO=0 SERVICE=0 FLEET=0 UNINSTALL=0 PURGE=0 PREFIX=''
while [ $# -gt 0 ]; do
  case $1 in
    --demo) DEMO=1 ;;
    --service) SERVICE=1 ;;
    --fleet) FLEET=1 ;;
    --uninstall) UNINSTALL=1 ;;
    --purge) PURGE=1 ;;
    --prefix)
      [ -n "${2:-}" ] || usage_error '--prefix needs a folder'
      PREFIX=$2
      shift
      ;;
    --prefix=?*) PREFIX=${1#--prefix=} ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) usage_error "unknown option: $1" ;;
  esac
  shift
done
if [ "$PURGE" = 1 ] && [ "$UNINSTALL" = 0 ]; then usage_error '--purge goes with --uninstall'; fi
if [ "$DEMO" = 1 ] && [ "$UNINSTALL" = 1 ]; then usage_error '--demo does not go with --uninstall'; fi
if [ "$SERVICE" = 1 ] && [ "$UNINSTALL" = 1 ]; then usage_error '--service does not go with --uninstall, which removes it'; fi

if [ "$FLEET" = 1 ] && [ "$UNINSTALL" = 1 ]; then usage_error '--fleet does not go with --uninstall, which removes all'; fi

if [ -n "${SUDO_USER:-}" ] && [ "$(id -u)" = 0 ] && [ "$SUDO_USER" != root ]; then
  complain "do not run this with sudo: disco is installed for one user, and its files would be root's. Run it as $SUDO_USER."
  exit 2
fi

unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX # each would make pip install somewhere else
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # what is compiled at the end of an installation belongs beside it
unset SOURCE_DATE_EPOCH # with it, llama.cpp is not compiled for this machine's instruction set
export PIP_USER=0
set_places
{ # read as a whole before it runs: a `git pull` during the minutes of compiling must not change what comes next
  if [ "$UNINSTALL" = 1 ]; then uninstall; else install; fi
  exit 0
}
