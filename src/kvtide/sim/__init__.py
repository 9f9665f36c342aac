"""The replay lab: real traffic through the real manager, on a virtual clock and without bytes."""
