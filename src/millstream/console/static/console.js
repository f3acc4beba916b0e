// Keeps a page's live area current: the server sends the parts that differ, and ticks by which the page knows its data's age.
"use strict";

// Without a tick for as long, the home doesn't answer.
const OLD_S = 5;

// Change one element to be like another, without replacing what stays: focus, selection and open details remain.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  const byId = new Map([...old.children].filter((node) => node.id).map((node) => [node.id, node]));
  wanted.forEach((node, index) => {
    const at = old.childNodes[index];
    const same = node.id ? byId.get(node.id) : undefined;
    if (same && same !== at) old.insertBefore(same, at ?? null);
    const now = same ?? at;
    if (now === undefined) old.append(node);
    else morph(now, node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

function ageWords(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

function watch(live) {
  const age = document.getElementById("age");
  const title = document.title;
  const said = document.getElementById("said");
  let heardAt = performance.now();
  let takenAt = heardAt - 1000 * Number(age.dataset.age);
  const parameters = new URLSearchParams({ path: live.dataset.path, version: live.dataset.version });
  const events = new EventSource(`/console/events?${parameters}`);
  events.addEventListener("whole", (event) => morphChildren(live, parsed(JSON.parse(event.data).live)));
  events.addEventListener("parts", (event) => {
    for (const [id, html] of Object.entries(JSON.parse(event.data))) {
      const part = document.getElementById(id);
      const fresh = parsed(html).firstElementChild;
      if (part && fresh) morph(part, fresh);
    }
  });
  events.addEventListener("tick", (event) => {
    const { age_s: ageS, troubles } = JSON.parse(event.data);
    heardAt = performance.now();
    takenAt = heardAt - 1000 * ageS;
    document.title = troubles ? `(${troubles}) ${title}` : title;
    show();
  });
  events.addEventListener("problem", () => {
    events.close();
    location.reload();
  });
  let wasOld = false;
  function show() {
    const now = performance.now();
    const isOld = now - heardAt > 1000 * OLD_S;
    const seconds = (now - takenAt) / 1000;
    const words = isOld ? `✖ no answer: data of ${ageWords(seconds)} ago` : seconds < OLD_S ? "live" : `data of ${ageWords(seconds)} ago`;
    if (age.textContent !== words) age.textContent = words;
    age.classList.toggle("old", isOld);
    if (isOld !== wasOld) said.textContent = isOld ? "The home doesn't answer." : "The home answers again.";
    wasOld = isOld;
  }
  setInterval(show, 1000);
  // A page that is left must not hold one of the browser's few connections to the home.
  addEventListener("pagehide", () => events.close());
  addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });
}

const live = document.getElementById("live");
if (live) watch(live);
