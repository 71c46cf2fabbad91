"""The bias trajectory: local Lipschitz constants read off the gradients of training."""
