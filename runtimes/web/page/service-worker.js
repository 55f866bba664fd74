// Two jobs: it adds the headers that make the page cross-origin isolated, for hosts where headers cannot be set, and it
// keeps the page's own files, so that the page loads when there is no network. Weights are the library's business.

const VERSION = 1;
const SCOPE = self.registration.scope;
// Storage belongs to the host, where other copies of this page may lie in other folders.
const CACHE_FAMILY = `caracal-page ${new URL(SCOPE).pathname} `;
const CACHE = CACHE_FAMILY + VERSION;
const KEPT_FOLDERS = ['page/', 'lib/', 'ort/', 'tokenizers/'];
const KEPT_FILES = ['', 'index.html', 'bundle/manifest.json'];
const NO_BODY = [101, 204, 205, 304];

self.addEventListener('install', () => self.skipWaiting());

self.addEventListener('activate', (event) => {
  event.waitUntil(deleteOldCaches().then(() => self.clients.claim()));
});

self.addEventListener('message', (event) => {
  if (event.data?.type === 'claim') event.waitUntil(self.clients.claim());
  if (event.data?.type === 'keep') event.waitUntil(keepAll(event.data.urls));
});

self.addEventListener('fetch', (event) => {
  const { request } = event;
  if (new URL(request.url).origin !== self.location.origin) return;
  const path = keptPath(request.url);
  if (request.method === 'GET' && path !== null && !request.headers.has('range')) {
    event.respondWith(networkFirst(event));
  } else if (
    request.mode === 'navigate' ||
    ['script', 'worker', 'sharedworker', 'iframe'].includes(request.destination)
  ) {
    event.respondWith(fetch(request).then(isolated));
  }
});

/** The path below the page's folder if the file is one of the page's own, else null. */
function keptPath(url) {
  const plain = url.split(/[?#]/)[0];
  if (!plain.startsWith(SCOPE)) return null;
  const path = plain.slice(SCOPE.length);
  return KEPT_FILES.includes(path) || KEPT_FOLDERS.some((folder) => path.startsWith(folder)) ? path : null;
}

async function networkFirst(event) {
  const { request } = event;
  let response;
  try {
    response = await fetch(request);
  } catch (error) {
    const kept = await find(request.url);
    if (kept) return kept;
    throw error;
  }
  // A host in trouble is as good as no network; that a file is missing is an answer.
  if (response.status >= 500) return (await find(request.url)) ?? isolated(response);
  const answer = isolated(response);
  if (response.status === 200) event.waitUntil(keep(request.url, answer.clone()));
  return answer;
}

/** The response with the headers of an isolated page. */
function isolated(response) {
  if (response.type === 'opaque' || response.type === 'opaqueredirect' || response.status === 0) return response;
  const headers = new Headers(response.headers);
  headers.set('Cross-Origin-Opener-Policy', 'same-origin');
  headers.set('Cross-Origin-Embedder-Policy', 'require-corp');
  headers.set('Cross-Origin-Resource-Policy', 'same-origin');
  const body = NO_BODY.includes(response.status) ? null : response.body;
  return new Response(body, { status: response.status, statusText: response.statusText, headers });
}

async function find(url) {
  const cache = await caches.open(CACHE);
  const kept = await cache.match(plainUrl(url));
  return kept && isolated(kept);
}

/** Writes a response to the cache, unless the copy there is the same by its validator: WebAssembly files are large. */
async function keep(url, response) {
  try {
    const cache = await caches.open(CACHE);
    const old = await cache.match(plainUrl(url));
    if (old && validator(old) !== null && validator(old) === validator(response)) {
      await response.body?.cancel();
      return;
    }
    await cache.put(plainUrl(url), response);
  } catch {
    // No room, or the network was cut on the way: the old copy stays.
  }
}

async function keepAll(urls) {
  for (const url of urls) {
    if (keptPath(url) === null || (await find(url))) continue;
    try {
      const response = await fetch(url);
      if (response.status === 200) await keep(url, isolated(response));
    } catch {
      return; // the network is cut; the next visit tries again
    }
  }
}

function validator(response) {
  const { headers } = response;
  return (
    headers.get('etag') ??
    (headers.has('last-modified') ? `${headers.get('last-modified')} ${headers.get('content-length')}` : null)
  );
}

function plainUrl(url) {
  return url.split(/[?#]/)[0];
}

async function deleteOldCaches() {
  const names = await caches.keys();
  await Promise.all(
    names.filter((name) => name.startsWith(CACHE_FAMILY) && name !== CACHE).map((name) => caches.delete(name)),
  );
}
