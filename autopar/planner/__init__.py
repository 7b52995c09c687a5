"""Search, lower, simulate, tighten: from an analysed step to a plan."""
