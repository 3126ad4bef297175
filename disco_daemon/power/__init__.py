"""The power, battery and heat of this machine: the daemon's only access to sensors.

`sensors.Sensors` picks the best readable source and says why better ones are not readable; `meter.EnergyMeter` turns
its readings into joules per token. `linux`, `macos` and `nvidia` parse; each takes a root folder or bytes, so that a
test needs no more than a recorded machine.
"""
