"""Three-dimensional convolutions as implicit GEMMs."""
