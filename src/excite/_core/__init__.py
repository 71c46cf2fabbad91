"""What every other part of Excite needs from torch and numpy."""
