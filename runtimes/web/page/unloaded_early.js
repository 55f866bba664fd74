// A classic script in the head, ahead of the modules: if one of them does not come, none of them runs, and this says so.
addEventListener(
  'error',
  (event) => {
    if (!(event.target instanceof HTMLScriptElement)) return;
    if (document.readyState === 'loading') addEventListener('DOMContentLoaded', tell);
    else tell();
  },
  true, // such an event does not bubble
);

function tell() {
  if (document.body.dataset.state !== 'idle') return;
  document.body.dataset.state = 'failed';
  /** @type {Record<string, string>} */
  const texts = {
    status: 'The page is not complete',
    'error-title': 'The network failed.',
    'error-text': 'A part of this page did not arrive. See that its host can be reached, then load the page again.',
  };
  for (const [id, text] of Object.entries(texts)) {
    const element = document.getElementById(id);
    if (element) element.textContent = text;
  }
  document.getElementById('error')?.removeAttribute('hidden');
}
