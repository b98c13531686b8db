"""What a run tells of itself while it trains, and afterwards: speed, memory and where its time went."""
