"""Conserved quantities: a ledger of what every optimizer step does to them."""
