"""From a plan to the program of every rank."""
