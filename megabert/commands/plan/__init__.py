"""Planning: memory, work and seconds an update, by arithmetic on shapes, a device table and a fabric."""
