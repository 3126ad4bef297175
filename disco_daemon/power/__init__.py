"""What this machine draws, how full its battery is, how hot it is: the daemon's only door to sensors.

`sensors.Sensors` picks the best source that can be read and says why the better ones could not; `meter.Meter` turns its
readings into joules per token. `linux`, `macos` and `nvidia` parse; each takes a root folder or bytes, so that a
recorded machine is all a test needs.
"""
