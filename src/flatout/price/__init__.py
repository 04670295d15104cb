"""What a run takes in time, memory, energy and money: before it begins, while it trains, and after.

`quote` prices a run that has not begun, from a short try; `elsewhere` moves a price to one of the
`cards` that are not here. `expected_end` says when a run that trains will end. All of them multiply
the measured `costs` with planned lengths, and `notes` keeps costs for the next run. `pace` fits the
time of steps, `energy` reads counters, `settings` and `words` are what a user writes and reads.
"""
