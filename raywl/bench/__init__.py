"""Side-by-side measurements. Imports no Ray; each contestant runs in a fresh process."""
