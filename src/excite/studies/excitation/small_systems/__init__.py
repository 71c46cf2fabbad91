"""The small systems of `excitation_basics`: what is learned with and without excitation."""
