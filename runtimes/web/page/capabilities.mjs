/** What this browser and this address allow, and where they do not, why. */

const PLAIN_HTTP =
  'this page came over plain HTTP from another machine, and browsers allow this only on https:// and on localhost';

/**
 * @typedef {object} GpuFinding
 * @property {boolean} available
 * @property {string} text the adapter, or why there is none; a phrase to stand after a colon
 */

/**
 * Looks for a WebGPU adapter.
 * @param {number} patience milliseconds after which a browser that does not answer counts as one without an adapter.
 * @returns {Promise<GpuFinding>}
 */
export async function findGpu(patience = 8000) {
  const gpu = /** @type {any} */ (navigator).gpu;
  if (!gpu) {
    return {
      available: false,
      text: isSecureContext ? 'this browser has no WebGPU (navigator.gpu is missing)' : PLAIN_HTTP,
    };
  }
  try {
    const adapter = await Promise.race([
      gpu.requestAdapter({ powerPreference: 'high-performance' }),
      new Promise((resolve) => setTimeout(resolve, patience, 'late')),
    ]);
    if (adapter === 'late') {
      return { available: false, text: `the browser named no GPU adapter within ${patience / 1000} seconds` };
    }
    if (adapter === null) {
      return {
        available: false,
        text: 'this browser has WebGPU, but found no GPU adapter that it allows (requestAdapter() gave null)',
      };
    }
    return { available: true, text: adapterName(adapter) };
  } catch (error) {
    return {
      available: false,
      text: `asking for a GPU adapter failed (${error instanceof Error ? error.message : error})`,
    };
  }
}

/** @param {any} adapter */
function adapterName(adapter) {
  const info = adapter.info ?? {};
  const name = info.description || [info.vendor, info.architecture].filter(Boolean).join(' ') || 'unnamed adapter';
  return info.isFallbackAdapter || adapter.isFallbackAdapter || /swiftshader/i.test(name)
    ? `${name}, which computes on the CPU`
    : name;
}

/**
 * How many threads WebAssembly may use here.
 * @returns {{most: number, suggested: number, reason: string}} `reason` says why there is only one; empty otherwise.
 */
export function findThreads() {
  const cores = Math.max(1, navigator.hardwareConcurrency || 1);
  if (!isSecureContext) return { most: 1, suggested: 1, reason: PLAIN_HTTP };
  if (!globalThis.crossOriginIsolated) {
    return {
      most: 1,
      suggested: 1,
      reason:
        'the page is not cross-origin isolated: its host sends no Cross-Origin-Opener-Policy and ' +
        'Cross-Origin-Embedder-Policy headers, and no service worker could add them',
    };
  }
  // Half of the logical cores are usually the second threads of the others, which dense products gain nothing from.
  return { most: cores, suggested: Math.min(4, Math.ceil(cores / 2)), reason: '' };
}
