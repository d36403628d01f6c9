"""Checking a ledger without trusting the program that wrote it: the hash chain, then ε from the events."""
