"""Where the seconds of a step go at each machine: a profile of a real run by what it waited for."""
