"""The driver and the compiler, behind one gate each, and what a kernel may use of the hardware."""
