"""A straight line through points of which the newest counts most."""

# Weight of the newest point.
NEWEST = 0.05
# So much the points must lie apart for their slope to be believed by half. What they once told is forgotten in time,
# so a slope that no point shows any more leans to 0, and is tried again.
DOUBT = 0.05


class Line:
    """Weighted least squares with sums alone: O(1) in time and memory."""

    def __init__(self) -> None:
        self._x = self._y = 0.0  # the middle of the points
        self._spread = self._joint = 0.0  # mean squares around it: of x, and of x with y

    def add(self, x: float, y: float) -> None:
        """One more point."""
        if not self._y:
            self._x, self._y = x, y
            return
        dx, dy = x - self._x, y - self._y
        self._x += NEWEST * dx
        self._y += NEWEST * dy
        self._spread = (1 - NEWEST) * (self._spread + NEWEST * dx * dx)
        self._joint = (1 - NEWEST) * (self._joint + NEWEST * dx * dy)

    @property
    def slope(self) -> float:
        """What one more x adds to y; never less than nothing."""
        return max(0.0, self._joint / (self._spread + DOUBT))

    def at(self, x: float) -> float:
        """y at this x, for a line that is nowhere left of 0 below 0; 0 without points."""
        slope = self.slope
        return max(self._y + slope * (x - self._x), slope * x)
