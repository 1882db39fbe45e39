"""Reports for people: charts as inline SVG, and pages that hold them with nothing from elsewhere."""
