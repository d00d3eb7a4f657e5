"""Who chooses the next plan, remembers what it cost, and tells a person."""
