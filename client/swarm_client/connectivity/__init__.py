"""Whether and how this volunteer can be reached: reachability, port mapping, relay policy."""
