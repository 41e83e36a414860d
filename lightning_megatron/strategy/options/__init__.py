"""Options of the strategy and checks of sizes."""
