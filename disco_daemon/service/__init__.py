"""disco as a user service: systemd's unit, launchd's property list, and their installation."""
