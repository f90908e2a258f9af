"""From a store to a checkpoint: runtime, schedules, health, the loop."""
