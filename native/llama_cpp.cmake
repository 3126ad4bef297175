# Read by llama-cpp-python's build of llama.cpp, right after its project().

# Leaves out the library that llama.cpp's own command-line programs share. It goes into the wheel, nothing there loads
# it, and compiling it takes long. A variable of this name goes before the cached one that the build forces on.
set(LLAMA_BUILD_COMMON OFF)

# Nor what reads pictures and sound, a third of the time: no model is shown any here.
set(LLAVA_BUILD OFF)

# Warnings about llama.cpp's code are for those who write it, and looking for them takes time.
set(LLAMA_ALL_WARNINGS OFF)

# Files that compute no token are compiled in half the time with less optimisation: what loads and saves, chat templates, memory
# of rare kinds, and the models, which put together what is to be computed by calls of llama-graph.cpp and ggml.c. Of `llama`
# these are a library of their own. Each half reads once what all of its files read first, the standard library's headers.
function(disco_compile_quickly)
  if(NOT TARGET llama OR NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    return()
  endif()
  get_target_property(source ggml-base SOURCE_DIR)
  foreach(name IN ITEMS ggml-backend-meta ggml-opt gguf)
    if(EXISTS "${source}/${name}.cpp")
      set_source_files_properties("${source}/${name}.cpp" TARGET_DIRECTORY ggml-base PROPERTIES COMPILE_OPTIONS -O1)
    endif()
  endforeach()

  get_target_property(source llama SOURCE_DIR)
  get_target_property(files llama SOURCES)
  set(models)
  set(others)
  foreach(file IN LISTS files)
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY "${source}" NORMALIZE OUTPUT_VARIABLE path)
    if(path MATCHES "/models/[^/]+\\.cpp$")
      list(APPEND models "${path}")
    elseif(path MATCHES
      "/(unicode-data|llama-(adapter|arch|chat|kv-cache-(dsa|dsa-iswa|dsv4|msa)|mmap|model|model-loader|model-saver|quant))\\.cpp$")
      list(APPEND others "${path}")
    else()
      continue()
    endif()
    list(REMOVE_ITEM files "${file}")
  endforeach()
  set(headers
    <algorithm> <array> <cinttypes> <cmath> <cstdint> <cstdio> <cstring> <functional> <limits> <map> <memory> <numeric> <queue>
    <random> <regex> <set> <sstream> <stdexcept> <string> <unordered_map> <unordered_set> <vector>
  )
  target_precompile_headers(llama PRIVATE ${headers})
  if(NOT models OR NOT others)
    return()
  endif()
  set_property(TARGET llama PROPERTY SOURCES ${files} $<TARGET_OBJECTS:llama-quick>)
  add_library(llama-quick OBJECT ${models} ${others})
  set_source_files_properties(${others} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  foreach(name IN ITEMS UNITY_BUILD UNITY_BUILD_BATCH_SIZE POSITION_INDEPENDENT_CODE)
    get_target_property(value llama ${name})
    set_target_properties(llama-quick PROPERTIES ${name} ${value})
  endforeach()
  target_compile_features(llama-quick PRIVATE cxx_std_17)
  target_compile_options(llama-quick PRIVATE $<TARGET_PROPERTY:llama,COMPILE_OPTIONS> -O1)
  target_compile_definitions(llama-quick PRIVATE $<TARGET_PROPERTY:llama,COMPILE_DEFINITIONS>)
  target_include_directories(llama-quick PRIVATE $<TARGET_PROPERTY:llama,INCLUDE_DIRECTORIES>)
  target_precompile_headers(llama-quick PRIVATE ${headers})
endfunction()
cmake_language(DEFER CALL disco_compile_quickly) # when all targets are there

# The targets with the kernels for CPUs: one, or with GGML_CPU_ALL_VARIANTS one for each generation. Once all are there.
function(disco_cpu_targets found)
  set(targets)
  if(TARGET ggml)
    get_target_property(source ggml SOURCE_DIR)
    get_property(targets DIRECTORY "${source}" PROPERTY BUILDSYSTEM_TARGETS)
    list(FILTER targets INCLUDE REGEX "^ggml-cpu(-|$)")
    list(FILTER targets EXCLUDE REGEX "-feats$") # what scores a generation, without kernels
  endif()
  set(${found} ${targets} PARENT_SCOPE)
endfunction()

# Sets `found` to the least time of dot products of quantised weights, as dot_products.c tells it, with each of two ways to
# compile them in turns: as they come, and with `option`; empty where they cannot be compiled or run by themselves.
function(disco_time_dot_products source option found)
  set(programs)
  foreach(way IN ITEMS plain other)
    set(program "${CMAKE_BINARY_DIR}/disco/dot_products_${way}")
    set(options -O3 -march=native)
    if(way STREQUAL other)
      list(APPEND options ${option})
    endif()
    try_compile(
      compiled "${CMAKE_BINARY_DIR}/disco/${way}"
      SOURCES "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/dot_products.c" "${source}/ggml-cpu/arch/x86/quants.c"
      CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${source};${source}/ggml-cpu;${source}/../include"
      COMPILE_DEFINITIONS ${options} -D_GNU_SOURCE
      LINK_LIBRARIES m
      COPY_FILE "${program}"
    )
    if(NOT compiled)
      return()
    endif()
    list(APPEND programs "${program}")
  endforeach()
  set(least)
  foreach(turn RANGE 4)
    set(times ${least})
    set(least)
    foreach(program IN LISTS programs)
      execute_process(COMMAND "${program}" OUTPUT_VARIABLE took RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE TIMEOUT 10)
      if(failed OR NOT took MATCHES "^[0-9]+$")
        return()
      endif()
      if(times)
        list(POP_FRONT times before)
        if(before LESS took)
          set(took ${before})
        endif()
      endif()
      list(APPEND least ${took})
    endforeach()
  endforeach()
  set(${found} ${least} PARENT_SCOPE)
endfunction()

# What GCC makes of AVX-512 is slower than it could be in two files: benchmarks/engine/compile_options.py compares. The dot products
# of quantised weights are 256 bits wide anyway, and may be better off without AVX-512: both ways are compiled and timed on
# this processor, and the faster one is taken. The matrix products profit of asking early for what comes next, where there is
# AVX-VNNI: tried with GCC 12 on an AMD Zen 5.
function(disco_options_of_files)
  disco_cpu_targets(targets)
  if(NOT targets OR NOT CMAKE_C_COMPILER_ID STREQUAL "GNU")
    return()
  endif()
  list(GET targets 0 target) # all are made in one folder, and a file's options are its folder's
  get_target_property(source ${target} SOURCE_DIR)
  # Any version: the header is right with those that are mended, too.
  set_source_files_properties(
    "${source}/ggml-cpu/amx/mmq.cpp" TARGET_DIRECTORY ${target}
    PROPERTIES COMPILE_OPTIONS "-include;${CMAKE_CURRENT_FUNCTION_LIST_DIR}/amx_tiles.h"
  )
  if(NOT GGML_NATIVE)
    return()
  endif()
  include(CheckCSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -march=native)
  check_c_source_compiles("#ifndef __AVX512F__\n#error\n#endif\nint main(void) { return 0; }" DISCO_AVX512)
  check_c_source_compiles(
    "#if !defined(__AVX512F__) || !defined(__AVXVNNI__)\n#error\n#endif\nint main(void) { return 0; }" DISCO_AVX_VNNI
  )
  if(DISCO_AVX512)
    set(times)
    disco_time_dot_products("${source}" -mno-avx512f times)
    if(times)
      list(GET times 0 plain)
      list(GET times 1 without)
      message(STATUS "dot products: ${plain} fs a weight with AVX-512, ${without} without")
      if(without LESS plain)
        set_source_files_properties(
          "${source}/ggml-cpu/arch/x86/quants.c" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -mno-avx512f
        )
      endif()
    else()
      message(WARNING "the dot products could not be timed: they are compiled as they come")
    endif()
  endif()
  if(DISCO_AVX_VNNI)
    set_source_files_properties(
      "${source}/ggml-cpu/llamafile/sgemm.cpp" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -fprefetch-loop-arrays
    )
  endif()
endfunction()
cmake_language(DEFER CALL disco_options_of_files) # when all targets are there

# Libraries of their own with kernels are installed beside those that load them.
function(disco_install_variants)
  disco_cpu_targets(targets)
  list(REMOVE_ITEM targets ggml-cpu)
  if(targets AND SKBUILD_PLATLIB_DIR)
    set_target_properties(${targets} PROPERTIES INSTALL_RPATH "$ORIGIN")
    install(TARGETS ${targets} LIBRARY DESTINATION "${SKBUILD_PLATLIB_DIR}/llama_cpp/lib")
  endif()
endfunction()
cmake_language(DEFER CALL disco_install_variants)

# Three changes to attention on a CPU. By the first two results stay the same to the bit, but with heads of a multiple of 128
# numbers by the first.
#
# With AVX512-FP16 (Intel's Xeons since 2023), ggml goes over 16-bit numbers 128 at a time, and over the rest, which is all
# of a head with 64, one by one, with conversions out of a table: without these instructions it takes 64 at a time.
#
# Each row passes all cells in use, most of which are other sequences': 32 at a time (masked_cells.h says how), in a copy of
# ops.cpp. Where that has not the lines known here, it stays as it is, and is slower. `disco_masked_cells` tells the engine.
#
# Where answers are to be exact a row goes over its cells one by one, with an exponential and a rounding at each; where not, by
# one of three ways, as there are rows and threads. In the same copy it takes 32 of them at a time, and some rows together
# (exact_attention.h): five times and twice as fast in prompts, and it rounds otherwise. `disco_exact_attention` tells the
# engine.
function(disco_attention)
  disco_cpu_targets(targets)
  if(NOT targets)
    return()
  endif()
  list(GET targets 0 target)
  get_target_property(source ${target} SOURCE_DIR)
  get_target_property(binary ${target} BINARY_DIR)
  set(ops "${source}/ggml-cpu/ops.cpp")
  file(READ "${ops}" text)
  # One row at a time.
  set(loop "for (int64_t ic = ic_start; ic < ic_end; ++ic) {\n")
  string(CONCAT loop_past
    "            if (mp && (ic = disco_next_seen_by(mp, ic, ic_start, ic_end)) == ic_end) {\n"
    "                break;\n"
    "            }\n"
  )
  # Many rows at a time, and 64 cells: whether no row sees one of them.
  set(tile "            if (mask) {\n                bool can_skip = true;\n")
  string(CONCAT tile_past
    "            if (mask) {\n"
    "                bool hidden = true;\n"
    "                for (int tq = 0; tq < tile_rows && hidden; tq++) {\n"
    "                    const ggml_fp16_t * mp = (const ggml_fp16_t *)((const char *) mask->data + (iq1 + tq)*mask->nb[1]"
    " + (iq2%mask->ne[2])*mask->nb[2] + (iq3%mask->ne[3])*mask->nb[3]);\n"
    "                    hidden = disco_sees_none(mp, ic, ic + kv_tile, nek1);\n"
    "                }\n"
    "                if (hidden) {\n"
    "                    continue;\n"
    "                }\n"
    "            }\n"
  )
  # Both, where exact_attention.h has it.
  set(by_rows "static void ggml_compute_forward_flash_attn_ext_f16_one_chunk(\n")
  set(v_type "    GGML_ASSERT((v->type == GGML_TYPE_F32 || v_to_float  ) && \"fattn: unsupported V-type\");\n\n    int ith = params->ith;\n\n    for (")
  string(CONCAT attend
    "#if defined(DISCO_ATTENDS)\n"
    "    if (!write_partials && disco_attends(dst)) {\n"
    "        disco_attend_rows(dst, ir0, ir1, q_to_vec_dot);\n"
    "        return;\n"
    "    }\n"
    "#endif\n"
  )
  # Each call of attention, which has its own mask, and chooses between the ways.
  set(way "    const bool use_ref = params->use_ref;\n")
  string(CONCAT way_past
    "    disco_begin_call();\n"
    "#if defined(DISCO_ATTENDS)\n"
    "    const bool use_ref = params->use_ref || disco_attends(dst);\n"
    "#else\n"
    "${way}"
    "#endif\n"
  )
  set(known TRUE)
  foreach(lines IN ITEMS loop tile way by_rows v_type)
    string(FIND "${text}" "${${lines}}" first)
    string(FIND "${text}" "${${lines}}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
      set(known FALSE)
    endif()
  endforeach()
  if(known)
    string(REPLACE "${loop}" "${loop}${loop_past}" text "${text}")
    string(REPLACE "${v_type}" "${attend}${v_type}" text "${text}")
    string(REPLACE "${by_rows}" "#include \"${CMAKE_CURRENT_FUNCTION_LIST_DIR}/exact_attention.h\"\n\n${by_rows}" text "${text}")
    string(REPLACE "${tile}" "${tile_past}${tile}" text "${text}")
    string(REPLACE "${way}" "${way_past}" text "${text}")
    set(header "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/masked_cells.h")
    set(ops "${binary}/disco/ops.cpp")
    file(CONFIGURE OUTPUT "${ops}" CONTENT "#include \"@header@\"\n@text@" @ONLY)
    foreach(one IN LISTS targets)
      get_target_property(files ${one} SOURCES)
      list(FILTER files EXCLUDE REGEX "(^|/)ggml-cpu/ops\\.cpp$")
      set_property(TARGET ${one} PROPERTY SOURCES ${files} "${ops}")
    endforeach()
  else()
    message(WARNING "ops.cpp is not the one that is known here: attention passes each cell by itself")
  endif()
  if(GGML_NATIVE AND CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    include(CheckCSourceCompiles)
    set(CMAKE_REQUIRED_FLAGS -march=native)
    check_c_source_compiles("#ifndef __AVX512FP16__\n#error\n#endif\nint main(void) { return 0; }" DISCO_AVX512_FP16)
    if(DISCO_AVX512_FP16)
      set_source_files_properties(
        "${ops}" "${source}/ggml-cpu/vec.cpp" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -mno-avx512fp16
      )
    endif()
  endif()
endfunction()
cmake_language(DEFER CALL disco_attention)

# What an expert comes to is multiplied with one number for each row. llama.cpp repeats that number's row, of one, for each number: a
# fourth of a prompt's time in a small mixture of experts. A copy of binary-ops.cpp takes a row at a time, to the same bits.
function(disco_one_for_a_row)
  disco_cpu_targets(targets)
  if(NOT targets)
    return()
  endif()
  list(GET targets 0 target)
  get_target_property(source ${target} SOURCE_DIR)
  get_target_property(binary ${target} BINARY_DIR)
  set(operations "${source}/ggml-cpu/binary-ops.cpp")
  set(text)
  if(EXISTS "${operations}")
    file(READ "${operations}" text)
  endif()
  set(row "        if (is_src1_contiguous_rows) {\n            // src1 is broadcastable across src0 and dst in i1, i2, i3\n")
  string(CONCAT one
    "        if (ne10 == 1) {\n"
    "            const float one = type_conversion_table<src1_t>::to_f32(*src1_ptr);\n"
    "            for (int64_t i = 0; i < ne00; ++i) {\n"
    "                dst_ptr[i] = type_conversion_table<dst_t>::from_f32(op(type_conversion_table<src0_t>::to_f32(src0_ptr[i]), one));\n"
    "            }\n"
    "            continue;\n"
    "        }\n"
  )
  string(FIND "${text}" "${row}" first)
  string(FIND "${text}" "${row}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(WARNING "binary-ops.cpp is another than the known one: one number for a row is multiplied with each by itself")
    return()
  endif()
  string(REPLACE "${row}" "${one}${row}" text "${text}")
  file(CONFIGURE OUTPUT "${binary}/disco/binary-ops.cpp" CONTENT "@text@" @ONLY)
  foreach(target IN LISTS targets)
    get_target_property(files ${target} SOURCES)
    list(FILTER files EXCLUDE REGEX "(^|/)ggml-cpu/binary-ops\\.cpp$")
    set_property(TARGET ${target} PROPERTY SOURCES ${files} "${binary}/disco/binary-ops.cpp")
  endforeach()
endfunction()
cmake_language(DEFER CALL disco_one_for_a_row)

# Products of weights in the packings that people download, in tiles that suit few rows and many (products.h, k_products.h). All that
# go to llamafile_sgemm come to products.cpp first, and the others go on. So that they come there, llama.cpp neither lays these
# weights out anew (repack.cpp) nor takes its tiles for many rows (tiled.cpp). Rows for K weights are packed there, too (quants.c).
# `disco_products` tells the engine.
function(disco_products)
  disco_cpu_targets(targets)
  if(NOT targets)
    return()
  endif()
  list(GET targets 0 target)
  get_target_property(source ${target} SOURCE_DIR)
  get_target_property(files ${target} SOURCES)
  list(FILTER files INCLUDE REGEX "(^|/)llamafile/sgemm\\.cpp$")
  if(NOT files)
    message(WARNING "there is no llamafile/sgemm.cpp: products are ggml's own")
    return()
  endif()
  set_source_files_properties(
    "${source}/ggml-cpu/llamafile/sgemm.cpp" TARGET_DIRECTORY ${target}
    PROPERTIES COMPILE_DEFINITIONS llamafile_sgemm=disco_other_products
  )
  set_source_files_properties(
    "${source}/ggml-cpu/repack.cpp" TARGET_DIRECTORY ${target}
    PROPERTIES COMPILE_DEFINITIONS ggml_cpu_has_avx2=disco_interleaves
  )
  # Without AVX-512 llama.cpp lays out nothing else on x86: what would is left out there, a tenth of the time.
  if(GGML_NATIVE AND CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    include(CheckCSourceCompiles)
    set(CMAKE_REQUIRED_FLAGS -march=native)
    string(CONCAT program
      "#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__) || defined(__AVX512F__)\n"
      "#error\n"
      "#endif\n"
      "int main(void) { return 0; }"
    )
    check_c_source_compiles("${program}" DISCO_NOTHING_INTERLEAVED)
    if(DISCO_NOTHING_INTERLEAVED)
      get_target_property(files ${target} SOURCES)
      list(FILTER files EXCLUDE REGEX "(^|/)ggml-cpu/(arch/x86/)?repack\\.cpp$")
      get_target_property(definitions ${target} COMPILE_DEFINITIONS)
      if(definitions)
        list(REMOVE_ITEM definitions GGML_USE_CPU_REPACK)
        set_target_properties(${target} PROPERTIES SOURCES "${files}" COMPILE_DEFINITIONS "${definitions}")
      endif()
    endif()
  endif()
  if(EXISTS "${source}/ggml-cpu/tiled/tiled.cpp")
    set_source_files_properties(
      "${source}/ggml-cpu/tiled/tiled.cpp" TARGET_DIRECTORY ${target}
      PROPERTIES COMPILE_DEFINITIONS
      "ggml_compute_forward_mul_mat_tiled=disco_other_tiles;ggml_compute_forward_mul_mat_id_tiled=disco_other_expert_tiles"
    )
    set_source_files_properties(
      "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/products.cpp" TARGET_DIRECTORY ${target}
      PROPERTIES COMPILE_DEFINITIONS DISCO_OTHER_TILES
    )
  endif()
  get_target_property(files ${target} SOURCES)
  if("${files}" MATCHES "/arch/x86/quants\\.c")
    set_source_files_properties(
      "${source}/ggml-cpu/arch/x86/quants.c" TARGET_DIRECTORY ${target}
      PROPERTIES COMPILE_DEFINITIONS quantize_row_q8_K=disco_other_packing
    )
    set_property(
      SOURCE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/products.cpp" TARGET_DIRECTORY ${target}
      APPEND PROPERTY COMPILE_DEFINITIONS DISCO_PACKS
    )
  endif()
  foreach(one IN LISTS targets)
    target_sources(${one} PRIVATE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/products.cpp")
  endforeach()
endfunction()
cmake_language(DEFER CALL disco_products)
