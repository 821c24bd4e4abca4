"""Confidence intervals of paired log-ratios, for all metrics of an experiment together.

Each pair gives, for every metric, d = log(feature / baseline). What is wanted is an interval of the typical d of each
metric such that, in an experiment of identical arms, all intervals together hold their true value 95 times in 100.

- *Location and its error.* A shared machine now and then stalls a whole trial. The 20% trimmed mean with the standard
  error from the winsorised variance (Yuen 1974; Wilcox, "Introduction to Robust Estimation") ignores a few such pairs,
  where a mean would drown in them.
- *All metrics together.* Metrics of one run are strongly correlated, and Bonferroni would charge for them as if they
  were not. The critical value is therefore the 95% quantile of max |t| over the metrics under random signs of the
  centred pairs, one sign for all metrics of a pair (the single-step maxT of Westfall and Young 1993; a wild
  bootstrap-t with Rademacher weights). Swapping the two arms of a pair of equals changes nothing but these signs, so
  the noise needs no shape: not normal, not equal between metrics, not independent between them.
- *The A/A band.* Pairs of the baseline against itself show what the machine alone can do: the band is the difference
  they found, or the 95% margin of its error (Yuen's, for each metric by itself: it is a floor, not a claim), whichever
  is larger. It is symmetric about 1, because which of two equals is called the first is arbitrary.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
TRIM = 0.2
MAX_FLIPS = 1024
_FLIP_SEED = 20240229
_EXACT = 1e-12  # log-ratios that agree to this differ by rounding, not by noise


@dataclass(frozen=True)
class Intervals:
    """Per metric, float64 arrays of shape [metrics]: the trimmed mean log-ratio, and its interval."""

    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray


def simultaneous_intervals(log_ratios: np.ndarray) -> Intervals:
    """Intervals that hold for all metrics together with confidence `CONFIDENCE`.

    log_ratios: float64, shape [pairs, metrics], finite; at least 2 pairs. The result is a function of them alone.
    """
    centre, error = _trimmed_mean(log_ratios.T)
    noisy = error > _EXACT
    # Flipped residuals of every metric: [flips, metrics, pairs]; float32 is ample for a quantile, and twice as fast.
    residuals = (log_ratios - centre).T[noisy].astype(np.float32)
    flipped_centre, flipped_error = _trimmed_mean(_signs(len(log_ratios))[:, None, :] * residuals)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.nan_to_num(np.abs(flipped_centre) / flipped_error, nan=0.0, posinf=np.inf)  # 0 / 0: nothing there
    half = np.zeros_like(error)
    half[noisy] = np.quantile(t.max(axis=1, initial=0.0), CONFIDENCE, method="higher") * error[noisy]
    return Intervals(centre, centre - half, centre + half)


def noise_band(log_ratios: np.ndarray) -> np.ndarray:
    """Half-width, in log-ratio, of each metric's A/A band, shape [metrics]."""
    centre, error = _trimmed_mean(log_ratios.T)
    freedom = len(log_ratios) - 2 * _cut(len(log_ratios)) - 1
    margin = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * error
    return np.maximum(np.maximum(np.abs(centre), margin), _EXACT)


def judge(feature: np.ndarray, noise: np.ndarray) -> tuple[Intervals, np.ndarray, np.ndarray]:
    """Holds the feature's log-ratios against the noise's, both of shape [pairs, metrics].

    Without pairs of noise the band is NaN, and nothing lies beyond it.

    Returns the intervals, the half-width of each metric's A/A band, and per metric +1 where the interval lies above the
    band, -1 where it lies below it, and 0 where they meet (int64, shape [metrics]).
    """
    intervals = simultaneous_intervals(feature)
    band = noise_band(noise) if len(noise) else np.full(noise.shape[1], np.nan)
    return intervals, band, (intervals.low > band).astype(np.int64) - (intervals.high < -band)


def _cut(pairs: int) -> int:
    """How many pairs the trimmed mean leaves out at each end."""
    return int(TRIM * pairs)


def _trimmed_mean(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trimmed mean over the last axis and its standard error (Yuen 1974)."""
    pairs = samples.shape[-1]
    cut = _cut(pairs)
    kept = pairs - 2 * cut
    inner = np.sort(samples, axis=-1)[..., cut : pairs - cut]
    # Winsorised: the `cut` values beyond each end of inner become that end. Sums about the mean of inner do not cancel.
    mean = inner.mean(axis=-1)
    inner -= mean[..., None]
    low, high = inner[..., 0], inner[..., -1]
    squares = np.einsum("...i,...i", inner, inner) + cut * (low**2 + high**2)
    spread = squares - (cut * (low + high)) ** 2 / pairs  # inner sums to 0 now
    return mean, np.sqrt(np.maximum(spread, 0.0) / (kept * (kept - 1)))


def _signs(pairs: int) -> np.ndarray:
    """Rows of signs, float32 [flips, pairs]: all where they are few (up to a common sign), else a fixed draw."""
    if 2 ** (pairs - 1) <= MAX_FLIPS:
        return np.array([(1, *rest) for rest in product((1, -1), repeat=pairs - 1)], np.float32)
    rng = np.random.Generator(np.random.PCG64(_FLIP_SEED))
    return rng.choice(np.array([-1, 1], np.float32), size=(MAX_FLIPS, pairs))
