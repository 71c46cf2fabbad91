"""Studies of *What training reveals about neural network complexity*."""
