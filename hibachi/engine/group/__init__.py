"""One model over several processes: rank 0 schedules, the others repeat its calls of the model."""
