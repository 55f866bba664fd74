/** The service worker: isolation where the host cannot set headers, and the page's files for when there is no network. */

const RELOADED = 'caracal-reloaded-for-isolation';
const PATIENCE_MS = 4000;

/**
 * Registers the service worker and waits until it controls the page, so that what is loaded from then on is kept.
 * Reloads the page once if that makes it cross-origin isolated.
 * @returns {Promise<boolean>} false when the page is about to be loaded again, and nothing more should be started.
 */
export async function setUpServiceWorker() {
  const container = navigator.serviceWorker;
  if (!container) return true;
  try {
    const registration = await container.register('./service-worker.js');
    if (!container.controller) await untilControlled(container, registration);
  } catch {
    // Blocked by the browser or its settings: the page works without, with one thread at worst.
    return true;
  }
  if (!globalThis.crossOriginIsolated && container.controller && mayReload()) {
    location.reload();
    return false;
  }
  container.controller?.postMessage({ type: 'keep', urls: loadedSoFar() });
  return true;
}

/** @param {ServiceWorkerContainer} container @param {ServiceWorkerRegistration} registration */
function untilControlled(container, registration) {
  // After a reload that bypasses service workers there is an active one that does not control the page.
  registration.active?.postMessage({ type: 'claim' });
  return new Promise((resolve) => {
    container.addEventListener('controllerchange', () => resolve(undefined), { once: true });
    setTimeout(resolve, PATIENCE_MS);
  });
}

/** What the page loaded before the service worker could see it. */
function loadedSoFar() {
  const here = location.href.split('#')[0];
  return [here, ...performance.getEntriesByType('resource').map((entry) => entry.name)].filter((url) =>
    url.startsWith(new URL('./', here).href),
  );
}

/** True once in a tab's life: a reload that did not help would not help the second time either. */
function mayReload() {
  try {
    if (sessionStorage.getItem(RELOADED) !== null) return false;
    sessionStorage.setItem(RELOADED, '1');
    return true;
  } catch {
    return false;
  }
}
