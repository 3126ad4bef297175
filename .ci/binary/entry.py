"""What PyInstaller makes a program of: `disco_daemon.cli.frozen`, as a script that belongs to no package."""

import sys

from disco_daemon.cli.frozen import main

sys.exit(main())
