"""From source to code that runs on this machine, and the caches of compiled code."""
