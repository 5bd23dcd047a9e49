"""Pages on a run or a plan: single HTML files that hold all their pictures and load nothing."""
