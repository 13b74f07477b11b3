"""What verified work costs, how soon it finds liars, and whether it accuses honest machines."""
