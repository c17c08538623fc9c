raise ImportError("a host with front ends alone has no torch")
