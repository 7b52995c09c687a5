"""Records of the captured program and of how its values lie on a mesh."""
