"""What a machine's user notices: load of the terminal views, and time until work yields."""
