"""A recorder of the last 200 steps that reports what moved before the loss spiked."""
