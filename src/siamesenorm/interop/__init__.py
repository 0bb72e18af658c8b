"""Models of other libraries: converted in place, stored, loaded, exported and evaluated."""
