"""What this computer offers: its devices, home folder, log file and service manager."""
