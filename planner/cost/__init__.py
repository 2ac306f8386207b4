"""The price of a plan: stage times, pipeline end times, gradient blocks, memory."""
