"""Many jobs: trainings, measurements and experiments, on this machine or on a cluster."""
