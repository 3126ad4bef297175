"""disco as a service of the user: systemd's unit, launchd's property list, and who installs and asks them."""
