"""What people look at: timelines and pages made from results. Knows nothing of how results come about."""
