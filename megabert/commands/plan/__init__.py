"""Planning: seconds an update at N GPUs, cost and failures, by arithmetic on shapes, a device table and a fabric."""
