"""What SGD makes of a conserved quantity, integrated from the start of the ledger (Kunin et al. 2021, for finite steps)."""
