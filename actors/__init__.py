"""Does the work: Ray actors over a training engine."""
