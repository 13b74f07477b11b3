"""What both sides of a swarm share: values, signatures, the wire, the model."""
