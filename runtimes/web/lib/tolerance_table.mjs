// Written by scripts/generate_web_tables.py from caracal_runtimes/tolerances.py; do not edit.
export const FORMAT = "caracal-parity";
export const FORMAT_VERSION = 1;
export const ROUNDINGS = 3;
export const MOST_ROUNDING = 0.001;
export const TOLERANCES = {
  "strict/float32": {
    "relative_l2": 1e-05,
    "atol": 5e-05,
    "rtol": 0.0001,
    "kl": 1e-07,
    "near_tie": 0.0001,
    "bits_per_byte": 1e-05
  },
  "close/float32": {
    "relative_l2": 0.0001,
    "atol": 0.0005,
    "rtol": 0.001,
    "kl": 1e-06,
    "near_tie": 0.001,
    "bits_per_byte": 0.0001
  },
  "half/float32": {
    "relative_l2": 0.02,
    "atol": 0.1,
    "rtol": 0.1,
    "kl": 0.05,
    "near_tie": 0.3,
    "bits_per_byte": 0.01
  },
  "strict/float16": {
    "relative_l2": 0.005,
    "atol": 0.02,
    "rtol": 0.02,
    "kl": 0.001,
    "near_tie": 0.05,
    "bits_per_byte": 0.001
  },
  "close/float16": {
    "relative_l2": 0.0051,
    "atol": 0.0205,
    "rtol": 0.021,
    "kl": 0.001001,
    "near_tie": 0.051000000000000004,
    "bits_per_byte": 0.0011
  },
  "half/float16": {
    "relative_l2": 0.025,
    "atol": 0.12000000000000001,
    "rtol": 0.12000000000000001,
    "kl": 0.051000000000000004,
    "near_tie": 0.35,
    "bits_per_byte": 0.011
  },
  "strict/bfloat16": {
    "relative_l2": 0.02,
    "atol": 0.05,
    "rtol": 0.05,
    "kl": 0.005,
    "near_tie": 0.1,
    "bits_per_byte": 0.002
  },
  "close/bfloat16": {
    "relative_l2": 0.0201,
    "atol": 0.0505,
    "rtol": 0.051000000000000004,
    "kl": 0.005001,
    "near_tie": 0.101,
    "bits_per_byte": 0.0021
  },
  "half/bfloat16": {
    "relative_l2": 0.04,
    "atol": 0.15000000000000002,
    "rtol": 0.15000000000000002,
    "kl": 0.055,
    "near_tie": 0.4,
    "bits_per_byte": 0.012
  },
  "strict/int8": {
    "relative_l2": 0.2,
    "atol": 0.25,
    "rtol": 0.25,
    "kl": 0.1,
    "near_tie": 1.0,
    "bits_per_byte": 0.01
  },
  "close/int8": {
    "relative_l2": 0.2001,
    "atol": 0.2505,
    "rtol": 0.251,
    "kl": 0.100001,
    "near_tie": 1.001,
    "bits_per_byte": 0.0101
  },
  "half/int8": {
    "relative_l2": 0.22,
    "atol": 0.35,
    "rtol": 0.35,
    "kl": 0.15000000000000002,
    "near_tie": 1.3,
    "bits_per_byte": 0.02
  },
  "strict/int4": {
    "relative_l2": 0.3,
    "atol": 0.7,
    "rtol": 0.7,
    "kl": 0.7,
    "near_tie": 2.0,
    "bits_per_byte": 0.03
  },
  "close/int4": {
    "relative_l2": 0.3001,
    "atol": 0.7004999999999999,
    "rtol": 0.701,
    "kl": 0.700001,
    "near_tie": 2.001,
    "bits_per_byte": 0.0301
  },
  "half/int4": {
    "relative_l2": 0.32,
    "atol": 0.7999999999999999,
    "rtol": 0.7999999999999999,
    "kl": 0.75,
    "near_tie": 2.3,
    "bits_per_byte": 0.04
  }
};
