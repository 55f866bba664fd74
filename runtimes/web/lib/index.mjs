/** Runs an exported Caracal bundle, and proves that it computes what PyTorch computed: what is the same in a browser and in Node. */

export { Bundle } from './bundle.mjs';
export * from './errors.mjs';
export { Model } from './model.mjs';
export { runParity } from './parity.mjs';
export { EXIT_CODES, verdictLine, verdictOf, wholeReport } from './parity_report.mjs';
