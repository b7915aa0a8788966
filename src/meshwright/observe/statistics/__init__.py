"""Statistical tests on step times: outliers, change points, CUSUM and rank tests."""
