"""Do these backends agree on my shapes? Cases, a judge that names the broken contract, shrinking, repros, reports, shadow mode."""
